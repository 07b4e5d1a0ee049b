"""The vocabularies of generated texts in languages other than English."""

from __future__ import annotations

from kvtune.profilers.quality.vocabulary import Vocabulary

GERMAN = Vocabulary(
    language="de",
    typical_characters=2.7,
    least_characters=2.0,
    names=(
        "Anna", "Bernd", "Claudia", "Dieter", "Erika", "Franz", "Gisela", "Heinz", "Ilse", "Jonas",
        "Katrin", "Lukas", "Monika", "Norbert", "Petra", "Rainer", "Sabine", "Thomas", "Ulrike",
        "Werner",
    ),
    times=(
        "am Montag", "am Dienstagabend", "am Mittwoch", "vor dem Frühstück", "nach dem Regen",
        "im Frühling", "am Ende des Sommers", "kurz vor Mitternacht", "am nächsten Tag",
        "eine Woche später", "während des Sturms", "nach dem Konzert", "am ersten warmen Tag",
        "in der Mittagspause",
    ),
    verbs=(
        "fand", "reparierte", "verkaufte", "suchte", "putzte", "versteckte", "kaufte", "malte",
        "bewunderte", "beschrieb", "brachte", "vergaß",
    ),
    things=(
        "einen alten Schirm", "die schwere Kiste", "ein kaputtes Fahrrad", "den roten Mantel",
        "eine kleine Lampe", "das blaue Sofa", "einen leeren Korb", "die lange Leiter",
        "ein dickes Buch", "den runden Spiegel", "eine warme Decke", "das hölzerne Pferd",
        "einen goldenen Ring", "die schmale Bank", "ein frisches Brot", "den schwarzen Koffer",
        "eine bunte Vase", "das große Bild", "einen silbernen Löffel", "die verlorene Karte",
    ),
    places=(
        "am Hafen", "in der alten Mühle", "hinter der Kirche", "auf dem Markt", "neben dem Brunnen",
        "im Garten", "unter der Brücke", "vor dem Rathaus", "in der Bäckerei", "am Bahnhof",
        "auf dem Hügel", "im Keller", "bei der Schule", "am Ufer des Flusses",
    ),
    tails=(
        "weil die Straße gesperrt war", "und niemand fragte warum", "obwohl es schon dunkel wurde",
        "ohne ein Wort zu sagen", "bevor die Gäste kamen", "und lachte darüber",
        "während die Kinder spielten", "trotz des starken Windes", "zur Freude der Nachbarn",
        "und schrieb einen langen Brief", "denn das Wetter war mild", "mit großer Sorgfalt",
    ),
    shapes=(
        "{time} {verb} {name} {thing} {place}.",
        "{name} {verb} {thing} {place}, {tail}.",
        "{place} {verb} {name} {thing}, {tail}.",
        "{time} wartete {name} {place} auf {other}.",
        "{other} sagte, {name} habe {thing} {place} gesehen.",
        "{name} und {other} trafen sich {time} {place}.",
        "niemand weiß, warum {name} {time} {thing} {place} ließ.",
        "zuerst {verb} {name} {thing}, dann kam {other} dazu.",
        "{time} brauchte {other} {thing}, {tail}.",
    ),
    owners=(
        "blauen Tresors", "grünen Tresors", "roten Tresors", "weißen Schranks", "gelben Schranks",
        "schwarzen Schranks", "alten Archivs", "neuen Archivs", "kleinen Labors", "großen Labors",
        "oberen Lagers", "unteren Lagers",
    ),
    code_fact="Der geheime Code des {owner} ist {code}.",
    code_question="Wie lautet der geheime Code des {owner}?",
    code_answer="Der geheime Code des {owner} ist",
)  # fmt: skip

FRENCH = Vocabulary(
    language="fr",
    typical_characters=2.8,
    least_characters=2.0,
    names=(
        "Amélie", "Bruno", "Chantal", "Denis", "Élodie", "Fabien", "Gisèle", "Henri", "Inès",
        "Jules", "Laure", "Marcel", "Nadine", "Olivier", "Pauline", "Rémi", "Solange", "Thierry",
        "Valérie", "Yves",
    ),
    times=(
        "lundi matin", "mardi soir", "mercredi", "avant le petit déjeuner", "après la pluie",
        "au printemps", "à la fin de l'été", "peu avant minuit", "le lendemain",
        "une semaine plus tard", "pendant la tempête", "après le concert",
        "le premier jour de soleil", "pendant la pause",
    ),
    verbs=(
        "a trouvé", "a réparé", "a vendu", "a cherché", "a nettoyé", "a caché", "a acheté",
        "a peint", "a admiré", "a décrit", "a apporté", "a oublié",
    ),
    things=(
        "un vieux parapluie", "la lourde caisse", "un vélo cassé", "le manteau rouge",
        "une petite lampe", "le canapé bleu", "un panier vide", "la longue échelle",
        "un gros livre", "le miroir rond", "une couverture chaude", "le cheval de bois",
        "un anneau doré", "le banc étroit", "un pain frais", "la valise noire",
        "un vase coloré", "le grand tableau", "une cuillère en argent", "la carte perdue",
    ),
    places=(
        "au port", "dans le vieux moulin", "derrière l'église", "sur le marché", "près du puits",
        "dans le jardin", "sous le pont", "devant la mairie", "dans la boulangerie", "à la gare",
        "sur la colline", "dans la cave", "à côté de l'école", "au bord de la rivière",
    ),
    tails=(
        "car la route était fermée", "et personne n'a demandé pourquoi", "malgré la nuit",
        "sans dire un mot", "avant l'arrivée des invités", "en riant beaucoup",
        "pendant que les enfants jouaient", "malgré le vent très fort", "pour plaire aux voisins",
        "puis a écrit une longue lettre", "car il faisait doux", "avec beaucoup de soin",
    ),
    shapes=(
        "{time}, {name} {verb} {thing} {place}.",
        "{name} {verb} {thing} {place}, {tail}.",
        "{place}, {name} {verb} {thing}, {tail}.",
        "{time}, {name} attendait {other} {place}.",
        "{other} raconte que {name} {verb} {thing} {place}.",
        "{name} et {other} se sont vus {place} {time}.",
        "personne ne sait pourquoi {name} {verb} {thing} {time}.",
        "d'abord {name} {verb} {thing}, ensuite {other} arrive {place}.",
        "{time}, {other} voulait {thing}, {tail}.",
    ),
    owners=(
        "du coffre bleu", "du coffre vert", "du coffre rouge", "de l'armoire blanche",
        "de l'armoire jaune", "de l'armoire noire", "du vieux portail", "du nouveau portail",
        "du petit laboratoire", "du grand laboratoire", "de l'ancien entrepôt",
        "du second entrepôt",
    ),
    code_fact="Le code secret {owner} est {code}.",
    code_question="Quel est le code secret {owner} ?",
    code_answer="Le code secret {owner} est",
)  # fmt: skip

SPANISH = Vocabulary(
    language="es",
    typical_characters=2.75,
    least_characters=2.0,
    names=(
        "Alicia", "Beatriz", "Carlos", "Diego", "Elena", "Federico", "Gloria", "Héctor", "Irene",
        "Javier", "Lucía", "Manuel", "Natalia", "Pablo", "Raquel", "Sergio", "Teresa", "Úrsula",
        "Vicente", "Ximena",
    ),
    times=(
        "el lunes", "el martes por la noche", "el miércoles", "antes del desayuno",
        "después de la lluvia", "en primavera", "al final del verano", "poco antes de medianoche",
        "al día siguiente", "una semana más tarde", "durante la tormenta", "después del concierto",
        "el primer día de sol", "durante la pausa",
    ),
    verbs=(
        "encontró", "reparó", "vendió", "buscó", "limpió", "escondió", "compró", "pintó",
        "admiró", "describió", "trajo", "olvidó",
    ),
    things=(
        "un paraguas viejo", "la caja pesada", "una bicicleta rota", "el abrigo rojo",
        "una lámpara pequeña", "el sofá azul", "una cesta vacía", "la escalera larga",
        "un libro grueso", "el espejo redondo", "una manta caliente", "el caballo de madera",
        "un anillo dorado", "el banco estrecho", "un pan fresco", "la maleta negra",
        "un jarrón de colores", "el cuadro grande", "una cuchara de plata", "el mapa perdido",
    ),
    places=(
        "en el puerto", "en el viejo molino", "detrás de la iglesia", "en el mercado",
        "junto al pozo", "en el jardín", "debajo del puente", "delante del ayuntamiento",
        "en la panadería", "en la estación", "sobre la colina", "en el sótano",
        "al lado de la escuela", "a la orilla del río",
    ),
    tails=(
        "porque la calle estaba cerrada", "y nadie preguntó por qué", "aunque ya era de noche",
        "sin decir una palabra", "antes de que llegaran los invitados", "y se rió mucho",
        "mientras los niños jugaban", "a pesar del viento", "para alegría de los vecinos",
        "y escribió una larga carta", "porque hacía buen tiempo", "con mucho cuidado",
    ),
    shapes=(
        "{time}, {name} {verb} {thing} {place}.",
        "{name} {verb} {thing} {place}, {tail}.",
        "{place}, {name} {verb} {thing}, {tail}.",
        "{time}, {name} esperaba a {other} {place}.",
        "{other} cuenta que {name} {verb} {thing} {place}.",
        "{name} y {other} se vieron {place} {time}.",
        "nadie sabe por qué {name} {verb} {thing} {time}.",
        "primero {name} {verb} {thing}, luego {other} llegó {place}.",
        "{time}, {other} quería {thing}, {tail}.",
    ),
    owners=(
        "de la caja fuerte azul", "de la caja fuerte verde", "de la caja fuerte roja",
        "del armario blanco", "del armario amarillo", "del armario negro", "del archivo antiguo",
        "del archivo nuevo", "del laboratorio pequeño", "del laboratorio grande",
        "del almacén de arriba", "del almacén de abajo",
    ),
    code_fact="El código secreto {owner} es {code}.",
    code_question="¿Cuál es el código secreto {owner}?",
    code_answer="El código secreto {owner} es",
)  # fmt: skip

DUTCH = Vocabulary(
    language="nl",
    typical_characters=2.65,
    least_characters=2.0,
    names=(
        "Anouk", "Bas", "Corrie", "Daan", "Eefje", "Floris", "Geertje", "Hein", "Ilona", "Joris",
        "Klaas", "Lieke", "Maarten", "Noortje", "Pieter", "Roos", "Sjoerd", "Truus", "Wouter",
        "Yvonne",
    ),
    times=(
        "op maandag", "op dinsdagavond", "op woensdag", "voor het ontbijt", "na de regen",
        "in de lente", "aan het einde van de zomer", "kort voor middernacht", "de volgende dag",
        "een week later", "tijdens de storm", "na het concert", "op de eerste warme dag",
        "tijdens de pauze",
    ),
    verbs=(
        "vond", "repareerde", "verkocht", "zocht", "poetste", "verstopte", "kocht", "schilderde",
        "bewonderde", "beschreef", "bracht", "vergat",
    ),
    things=(
        "een oude paraplu", "de zware kist", "een kapotte fiets", "de rode jas",
        "een kleine lamp", "de blauwe bank", "een lege mand", "de lange ladder",
        "een dik boek", "de ronde spiegel", "een warme deken", "het houten paard",
        "een gouden ring", "het smalle bankje", "een vers brood", "de zwarte koffer",
        "een bonte vaas", "het grote schilderij", "een zilveren lepel", "de verloren kaart",
    ),
    places=(
        "in de haven", "bij de oude molen", "achter de kerk", "op de markt", "naast de put",
        "in de tuin", "onder de brug", "voor het stadhuis", "bij de bakker", "op het station",
        "boven op de heuvel", "in de kelder", "bij de school", "aan de oever van de rivier",
    ),
    tails=(
        "omdat de weg dicht was", "en niemand vroeg waarom", "hoewel het al donker werd",
        "zonder een woord te zeggen", "voordat de gasten kwamen", "en lachte erom",
        "terwijl de kinderen speelden", "ondanks de harde wind", "tot plezier van de buren",
        "en schreef een lange brief", "want het weer was zacht", "met veel zorg",
    ),
    shapes=(
        "{time} {verb} {name} {thing} {place}.",
        "{name} {verb} {thing} {place}, {tail}.",
        "{place} {verb} {name} {thing}, {tail}.",
        "{time} wachtte {name} {place} op {other}.",
        "{other} zei dat {name} {thing} {place} had gezien.",
        "{name} en {other} zagen elkaar {time} {place}.",
        "niemand weet waarom {name} {thing} {time} {place} liet staan.",
        "eerst {verb} {name} {thing}, daarna kwam {other} erbij.",
        "{time} wilde {other} {thing} hebben, {tail}.",
    ),
    owners=(
        "de blauwe kluis", "de groene kluis", "de rode kluis", "de witte kast", "de gele kast",
        "de zwarte kast", "het oude archief", "het nieuwe archief", "het kleine laboratorium",
        "het grote laboratorium", "de bovenste schuur", "de onderste schuur",
    ),
    code_fact="De geheime code van {owner} is {code}.",
    code_question="Wat is de geheime code van {owner}?",
    code_answer="De geheime code van {owner} is",
)  # fmt: skip

POLISH = Vocabulary(
    language="pl",
    typical_characters=1.95,
    least_characters=1.5,
    names=(
        "Agnieszka", "Bartek", "Celina", "Dorota", "Edyta", "Filip", "Grzegorz", "Hanna",
        "Iwona", "Jacek", "Kasia", "Leszek", "Magda", "Natan", "Ola", "Piotr", "Renata", "Stefan",
        "Tomek", "Wanda",
    ),
    times=(
        "w poniedziałek", "we wtorek wieczorem", "w środę", "przed śniadaniem", "po deszczu",
        "na wiosnę", "pod koniec lata", "tuż przed północą", "następnego dnia",
        "tydzień później", "podczas burzy", "po koncercie", "w pierwszy ciepły dzień",
        "w czasie przerwy",
    ),
    verbs=(
        "znajduje", "naprawia", "sprzedaje", "widzi", "czyści", "chowa", "kupuje", "maluje",
        "podziwia", "opisuje", "przynosi", "gubi",
    ),
    things=(
        "stary parasol", "ciężką skrzynię", "zepsuty rower", "czerwony płaszcz", "małą lampę",
        "niebieską kanapę", "pusty koszyk", "długą drabinę", "grubą książkę", "okrągłe lustro",
        "ciepły koc", "drewnianego konia", "złoty pierścień", "wąską ławkę", "świeży chleb",
        "czarną walizkę", "kolorowy wazon", "duży obraz", "srebrną łyżkę", "zgubioną mapę",
    ),
    places=(
        "w porcie", "w starym młynie", "za kościołem", "na rynku", "obok studni", "w ogrodzie",
        "pod mostem", "przed ratuszem", "w piekarni", "na dworcu", "na wzgórzu", "w piwnicy",
        "przy szkole", "nad brzegiem rzeki",
    ),
    tails=(
        "bo droga jest zamknięta", "i nikt nie pyta dlaczego", "chociaż robi się ciemno",
        "bez jednego słowa", "zanim przyjdą goście", "i bardzo się śmieje",
        "kiedy dzieci się bawią", "mimo silnego wiatru", "ku radości sąsiadów",
        "i pisze długi list", "bo pogoda jest łagodna", "z wielką starannością",
    ),
    shapes=(
        "{time} {name} {verb} {thing} {place}.",
        "{name} {verb} {thing} {place}, {tail}.",
        "{place} {name} {verb} {thing}, {tail}.",
        "{time} {name} czeka {place}, a {other} się spóźnia.",
        "{other} mówi, że {name} {verb} {thing} {place}.",
        "{name} i {other} spotykają się {place} {time}.",
        "nikt nie wie, dlaczego {name} {verb} {thing} {time}.",
        "najpierw {name} {verb} {thing}, potem {other} przychodzi {place}.",
        "{time} {other} {verb} {thing}, {tail}.",
    ),
    owners=(
        "niebieskiego sejfu", "zielonego sejfu", "czerwonego sejfu", "białej szafy",
        "żółtej szafy", "czarnej szafy", "starego archiwum", "nowego archiwum",
        "małego laboratorium", "dużego laboratorium", "górnego magazynu", "dolnego magazynu",
    ),
    code_fact="Tajny kod do {owner} to {code}.",
    code_question="Jaki jest tajny kod do {owner}?",
    code_answer="Tajny kod do {owner} to",
)  # fmt: skip

CHINESE = Vocabulary(
    language="zh",
    typical_characters=0.55,
    least_characters=0.3,
    names=(
        "小明", "王芳", "李强", "张伟", "刘洋", "陈静",
        "杨帆", "赵雪", "周杰", "吴娜", "徐亮", "孙丽",
        "马超", "朱敏", "胡军", "郭涛", "何梅", "高峰", "林燕", "罗文",
    ),
    times=(
        "星期一", "星期二晚上", "星期三", "早饭以前",
        "下雨以后", "春天", "夏天快结束时", "半夜之前",
        "第二天", "一个星期以后", "刮大风的时候", "音乐会以后", "天气变暖的那天", "午休的时候",
    ),
    verbs=(
        "找到了", "修好了", "卖掉了", "看见了", "擦干净了", "藏起了", "买了", "画了", "欣赏了",
        "描述了", "带来了", "忘记了",
    ),
    things=(
        "一把旧雨伞", "那个沉重的箱子", "一辆坏自行车", "那件红色大衣", "一盏小灯", "那张蓝色沙发",
        "一个空篮子", "那架长梯子", "一本厚书", "那面圆镜子", "一条暖和的毯子", "那匹木马",
        "一枚金戒指", "那条窄板凳", "一个新鲜面包", "那只黑色皮箱", "一个彩色花瓶", "那幅大画",
        "一把银勺子", "那张丢失的地图",
    ),
    places=(
        "在港口", "在老磨坊", "在教堂后面", "在市场上",
        "在井边", "在花园里", "在桥下", "在市政厅前",
        "在面包店", "在火车站", "在山坡上", "在地下室", "在学校旁边", "在河岸上",
    ),
    tails=(
        "因为路封了", "没有人问为什么", "虽然天快黑了",
        "一句话也没说", "客人还没有到", "大家都笑了",
        "孩子们正在玩耍", "尽管风很大", "邻居们很高兴",
        "后来写了一封长信", "因为天气很好", "非常小心",
    ),
    shapes=(
        "{time}，{name}{place}{verb}{thing}。",
        "{name}{place}{verb}{thing}，{tail}。",
        "{time}，{name}{verb}{thing}，{tail}。",
        "{time}，{name}{place}等{other}。",
        "{other}说，{name}{place}{verb}{thing}。",
        "{name}和{other}{time}{place}见面。",
        "没有人知道为什么{name}{time}{verb}{thing}。",
        "{name}先{verb}{thing}，然后{other}来了，{tail}。",
        "{time}，{other}想要{thing}，{tail}。",
    ),
    owners=(
        "蓝色保险柜", "绿色保险柜", "红色保险柜", "白色柜子", "黄色柜子", "黑色柜子", "旧档案室",
        "新档案室", "小实验室", "大实验室", "楼上仓库", "楼下仓库",
    ),
    code_fact="{owner}的密码是{code}。",
    code_question="{owner}的密码是什么？",
    code_answer="{owner}的密码是",
    joint="",
)  # fmt: skip

OTHERS = (GERMAN, FRENCH, SPANISH, DUTCH, POLISH, CHINESE)
